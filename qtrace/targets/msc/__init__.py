"""MSCGraph, the graph document of TVM's multi-system compiler: JSON and prototxt, and its way back."""
