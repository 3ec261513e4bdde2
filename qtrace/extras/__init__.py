"""Extras: each folder is a tool next to the road, loaded when it is asked for."""
