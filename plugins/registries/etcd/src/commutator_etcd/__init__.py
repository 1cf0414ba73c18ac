"""The registry `etcd`: workers and their leases in an etcd v3 cluster."""
