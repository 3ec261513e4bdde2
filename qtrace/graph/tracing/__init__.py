"""Tracing: MegEngine's tracer in eval mode, and what a trace cannot hold."""
