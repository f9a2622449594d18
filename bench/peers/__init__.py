"""The scripts that this project is measured against, each as a good user of its library would write it.

Each is run by a Python of its own, with the path of a JSON file: ``table``, ``columns``, ``models`` (name ->
folder), ``max_length`` and ``output``, the folder for ``<model>.npy`` with probabilities, float [rows, labels] in
the table's order.
"""
