"""Parts that the recipes of several families import."""
