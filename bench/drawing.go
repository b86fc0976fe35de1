package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/legion-gorm/legion/bench/internal/plot"
)

// drawing is the plot of the results that stand on an axis: one panel for each axis, one
// line for each contender.
func drawing(results []result) plot.Plot {
	drawn := plot.Plot{Title: "Time of a verdict"}

	for _, axis := range []string{axisHistory, axisWindow, axisConversation, axisCallers} {
		panel := plot.Panel{XLabel: axis, YLabel: "ms"}

		for _, result := range results {
			if result.Axis != axis {
				continue
			}

			name := result.Path

			index := slices.IndexFunc(panel.Lines, func(line plot.Line) bool { return line.Name == name })
			if index < 0 {
				index = len(panel.Lines)
				panel.Lines = append(panel.Lines, plot.Line{Name: name, IsReference: name == result.Floor})
			}

			panel.Lines[index].Points = append(panel.Lines[index].Points, plot.Point{X: float64(result.At), Y: result.PerCall / 1000})
		}

		if len(panel.Lines) > 0 {
			drawn.Panels = append(drawn.Panels, panel)
		}
	}

	return drawn
}

// plotAgain draws the plot of the folder from the JSON in it.
func plotAgain(folder string) error {
	document, err := os.ReadFile(filepath.Join(folder, jsonFile))
	if err != nil {
		return fmt.Errorf("read the results: %w", err)
	}

	var results []result
	if err := json.Unmarshal(document, &results); err != nil {
		return fmt.Errorf("read %s: %w", jsonFile, err)
	}

	return saveFile(folder, plotFile, drawing(results).SVG())
}
