"""The prepared graph in torch: the same exprs and fake quants, for the steps of what learns.

torch computes the gradients by the same formulas as MegEngine, and the parameters stay
the MegEngine module's. ``torch`` is an optional package (the extra ``torch``): only the choice of an
engine imports these modules.
"""
