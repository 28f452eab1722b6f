"""Audits of recorded updates: opening the records, attacking them, scoring with a ground truth if there is one."""
