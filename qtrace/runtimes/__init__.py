"""Runtimes in processes of their own: in this interpreter, in another one, or on another machine.

A runtime may abort its process, or be installed in another interpreter or on another machine. ``worker.py``
loads and runs files there, for requests over pipes; it needs only numpy and the runtime. ``RuntimeHost``
(``host.py``) says where, ``child.py`` has the process and the files that are loaded there. After the command
of a runner, ``tunnel.py`` is the far end. The local sessions of onnxruntime and OpenVINO (``onnxfile/``) are
objects of ``worker.py``, too, so that both ways have one set of options.
"""
