"""One request on its way: the call, its body, its plan, its generation and its answer."""
