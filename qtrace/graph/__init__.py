"""The graph layer: the only room that touches the internals of MegEngine's traced modules."""
