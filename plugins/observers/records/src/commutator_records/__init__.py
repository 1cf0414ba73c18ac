"""What front doors write down: an audit log, and traces to replay."""
