"""The process around a computation: what C libraries print, and how MegEngine's threads wait."""
