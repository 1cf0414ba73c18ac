"""The processes of a deployment: starting, watching, finding and stopping them."""
