"""The stages in a row: from a network and data to a verdict, to a folder, or to a verified file."""
