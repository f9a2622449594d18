from ensemble.analysis.report.base import Section


class Calibration(Section):
    title = "Calibration"

    def html(self, data):
        return None
