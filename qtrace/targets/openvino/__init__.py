"""OpenVINO on CPU."""
