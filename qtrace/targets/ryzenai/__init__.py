"""AMD's Ryzen AI."""
