"""An endpoint picker: the door `endpoint_picker`, the router `named`, `commutator epp check`."""
