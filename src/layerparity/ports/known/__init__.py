"""Ports: implementations that are judged; conf/port names one, or a user's own, by _target_."""
