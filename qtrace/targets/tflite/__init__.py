"""TFLite, which LiteRT runs."""
