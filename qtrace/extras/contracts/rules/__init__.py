"""The rules of contracts, by what they look at; a target says which of them it has, with which limits."""
