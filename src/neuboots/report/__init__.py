"""Reports: tables, checks and plots of evaluations, as text and as a self-contained HTML page.

Nothing is imported here, since plots need matplotlib.
"""
