"""From a traced module to a prepared one: the passes, the phases, and the record that a model carries."""
