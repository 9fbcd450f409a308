"""Integer programs solved by HiGHS: the exact references that the fast methods are measured against. Pure: no torch."""
