"""Extras: each folder is a tool beside the road, loaded when it is asked for."""
