"""Export a trained model as one file for other programs; verified before it is written."""

from vitascope.export.int8 import write_int8
from vitascope.export.onnx_file import write_onnx
from vitascope.export.report import ExportReport
from vitascope.export.run_export import export_run
from vitascope.export.torch_file import write_torch

__all__ = ["ExportReport", "export_run", "write_int8", "write_onnx", "write_torch"]
