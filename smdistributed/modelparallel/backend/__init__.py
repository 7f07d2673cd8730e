"""Holds `exceptions`, whose classes launchers list; it is `smp.exceptions`."""
