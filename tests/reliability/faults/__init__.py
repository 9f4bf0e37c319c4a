"""Faults that are put into real runs, and what must hold after each.

A module is a family of faults. Its campaigns, functions of a :class:`faults.lab.Lab` and of how much to do, are listed
in :data:`faults.campaigns.CAMPAIGNS`. `run.py` runs them in full, `test_faults.py` a few trials of each.
"""
