"""The launcher of kind `ray`: agents on the nodes of a Ray cluster."""
