"""The Triton kernels and the code that launches them, one stage of the mathematics in each file.

Imported only where impl="triton" is used. From the folder above they import only `paths` and `rules`, which
say in plain Python which kernels run and which columns a row leaves out.
"""
