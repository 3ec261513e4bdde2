"""The process around a computation: what C libraries print, how MegEngine's threads wait, signals."""
