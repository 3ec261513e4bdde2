"""Programs for interpreters of their own, where other tools are installed; they stand alone."""
