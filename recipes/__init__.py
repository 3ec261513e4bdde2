"""Recipes: configs for model families, one YAML file each; the file name is the name that users give."""
