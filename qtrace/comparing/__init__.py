"""A graph next to a reference, on batches: what is run, in which groups it is compared, and the sums of it.

``runs.py`` gives the outputs of a graph for batches. Where rows are picked by values (``selections.py``), it
takes the selections of another run, so that equal rows meet. ``sums.py`` adds up the errors.

An output that packs unlike quantities, such as boxes and scores, has one sum of squares. The largest of them
own it: it hides whatever happens to the small ones. So each group of columns (``groups.py``) is measured on
its own, and the worst one decides. ``structure.py`` reads from the graph which columns belong together.
"""
