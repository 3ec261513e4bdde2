"""The stages in a row: from a network and data to a verdict, to a folder, or to a verified file.

``writing.py`` writes, verifies and judges the file. ``delivering.py`` measures it next to the user's own
file, or else next to float; it is the one place where a clock decides: a file that is slower by more than 5
% beyond doubt is replaced by float. ``original.py`` opens the network as it was given, with which
``preparation/faithfulness.py`` compares the float graph.
"""
