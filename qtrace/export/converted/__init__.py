"""What every exporter reads of a converted graph."""
