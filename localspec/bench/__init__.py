"""Comparisons on this machine: arms by cases by temperatures, to rows, to figures, to a report.

settings, arms, cases    what is compared
runs                     an engine, and one reply of it   exactness    is it plain decoding's
compare                  every arm on every prompt        kept         the file of --out
results, statistics      rows and cells with intervals    report, tables   for people
remote, remote_report    a server under several requests at once
"""
