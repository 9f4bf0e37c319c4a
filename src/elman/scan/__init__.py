"""What runs over all steps of a segment at once, for the cells that have something quicker than their step repeated."""
