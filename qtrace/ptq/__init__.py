"""Post-training algorithms, one a file: the file name is the name in a recipe's ``ptq`` list."""
