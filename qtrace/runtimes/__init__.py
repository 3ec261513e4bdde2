"""Runtimes in processes of their own: in this interpreter, in another one, or on another machine."""
