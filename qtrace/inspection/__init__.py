"""What a quantized graph does and why: explanations, comparisons, and the float twin.

``explanation/`` prints the annotation. ``comparison/`` measures where the error comes from against the
float twin. ``sensitivity/`` finds the fewest layers to raise. Its ``diagnosis/`` gives the verdict at the
end of ``qtrace calibrate``: it measures each channel of each site, names causes, and writes the recipe that
cures them.
"""
