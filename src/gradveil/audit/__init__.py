"""Clients x defences x attacks x seeds, run, judged and recorded."""
