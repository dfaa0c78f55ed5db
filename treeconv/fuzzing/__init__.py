"""Fuzz campaigns that lose nothing: what ``treeconv fuzz`` runs.

:mod:`.supervise` starts worker processes and watches them; a :mod:`.worker` runs jobs, made by
:mod:`.plan`: stored cases first, then :mod:`.search` (Hypothesis over the backend laws), :mod:`.parsers`
(converter and file readers) and :mod:`.bulk` (thousands of trees a launch). What is found goes to the
:mod:`.store`, under its :mod:`.signature`.
"""
