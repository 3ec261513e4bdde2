"""Targets: each folder is a plug-in: a backend, a writer, a runtime and a runner, loaded when asked for."""
