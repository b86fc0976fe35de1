// Package plot draws lines on logarithmic axes as SVG. It has a background of its own,
// dark where the reader prefers that, so that it can stand on any page.
package plot

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A Plot is panels beside and below each other, with one legend.
type Plot struct {
	Title  string
	Panels []Panel
}

// A Panel is lines over one pair of axes, both logarithmic.
type Panel struct {
	XLabel, YLabel string
	Lines          []Line
}

// A Line is drawn in the colour and shape of its name, the same in all panels.
type Line struct {
	Name string

	// IsReference draws it dashed and grey.
	IsReference bool

	Points []Point
}

// A Point has positive coordinates.
type Point struct{ X, Y float64 }

// Sizes in pixels.
const (
	columns     = 2
	panelWidth  = 420
	panelHeight = 270

	left, right, top, bottom = 58, 16, 18, 46

	titleHeight  = 44
	legendHeight = 34
	legendWidth  = 160
	tick         = 4
	radius       = 3.5
	fontSize     = 12
)

// style has a colour for each line that can be told from the others, also by those who
// do not see red and green apart, on either background.
const style = `<style>
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .title { font-size: 15px; font-weight: 600; }
  .page { fill: #ffffff; }
  .grid { stroke: #d0d7de; stroke-width: 1; }
  .axis { stroke: #57606a; stroke-width: 1; }
  .line { fill: none; stroke-width: 2; }
  .c0 { stroke: #0969da; } .m0 { fill: #0969da; }
  .c1 { stroke: #bc4c00; } .m1 { fill: #bc4c00; }
  .c2 { stroke: #8250df; } .m2 { fill: #8250df; }
  .c3 { stroke: #1a7f37; } .m3 { fill: #1a7f37; }
  .reference { stroke: #6e7781; stroke-dasharray: 5 4; } .mreference { fill: #6e7781; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .page { fill: #0d1117; }
    .grid { stroke: #30363d; }
    .axis { stroke: #8b949e; }
    .c0 { stroke: #58a6ff; } .m0 { fill: #58a6ff; }
    .c1 { stroke: #f0883e; } .m1 { fill: #f0883e; }
    .c2 { stroke: #bc8cff; } .m2 { fill: #bc8cff; }
    .c3 { stroke: #3fb950; } .m3 { fill: #3fb950; }
    .reference { stroke: #8b949e; } .mreference { fill: #8b949e; }
  }
</style>
`

const colours = 4

// SVG returns the drawing.
func (p Plot) SVG() string {
	rows := (len(p.Panels) + columns - 1) / columns
	width, height := columns*panelWidth, titleHeight+rows*panelHeight+legendHeight

	var svg strings.Builder

	fmt.Fprintf(&svg, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s">`+"\n",
		width, height, width, height, html.EscapeString(p.Title))
	svg.WriteString(style)
	fmt.Fprintf(&svg, `<rect class="page" width="%d" height="%d" rx="6"/>`+"\n", width, height)
	fmt.Fprintf(&svg, `<text class="title" x="%d" y="%d">%s</text>`+"\n", left, titleHeight-tick*4, html.EscapeString(p.Title))

	classes := p.classes()

	for i, panel := range p.Panels {
		fmt.Fprintf(&svg, `<g transform="translate(%d %d)">`+"\n", i%columns*panelWidth, titleHeight+i/columns*panelHeight)
		panel.draw(&svg, classes)
		svg.WriteString("</g>\n")
	}

	p.drawLegend(&svg, classes, height-legendHeight/2)
	svg.WriteString("</svg>\n")

	return svg.String()
}

// names are those of all lines, each once, references last.
func (p Plot) names() (names []string, references map[string]bool) {
	references = make(map[string]bool)

	for _, wanted := range []bool{false, true} {
		for _, panel := range p.Panels {
			for _, line := range panel.Lines {
				if line.IsReference == wanted && !slices.Contains(names, line.Name) {
					names = append(names, line.Name)
					references[line.Name] = wanted
				}
			}
		}
	}

	return names, references
}

func (p Plot) classes() map[string]string {
	names, references := p.names()
	classes := make(map[string]string, len(names))

	for i, name := range names {
		classes[name] = strconv.Itoa(i % colours)
		if references[name] {
			classes[name] = "reference"
		}
	}

	return classes
}

func lineClass(class string) string {
	if class == "reference" {
		return "line reference"
	}

	return "line c" + class
}

func (p Plot) drawLegend(svg *strings.Builder, classes map[string]string, y int) {
	names, _ := p.names()

	for i, name := range names {
		x := left + i*legendWidth
		fmt.Fprintf(svg, `<path class="%s" d="M%d %dh24"/><circle class="m%s" cx="%d" cy="%d" r="%g"/><text x="%d" y="%d">%s</text>`+"\n",
			lineClass(classes[name]), x, y, classes[name], x+12, y, radius, x+32, y+tick, html.EscapeString(name))
	}
}

func (p Panel) draw(svg *strings.Builder, classes map[string]string) {
	x := p.axis(func(point Point) float64 { return point.X }, left, panelWidth-right)
	y := p.axis(func(point Point) float64 { return point.Y }, panelHeight-bottom, top)

	for _, power := range x.ticks() {
		at := x.position(power)
		fmt.Fprintf(svg, `<path class="grid" d="M%.1f %dV%d"/><text x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n",
			at, top, panelHeight-bottom, at, panelHeight-bottom+tick+fontSize, label(power))
	}

	for _, power := range y.ticks() {
		at := y.position(power)
		fmt.Fprintf(svg, `<path class="grid" d="M%d %.1fH%d"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n",
			left, at, panelWidth-right, left-tick, at+tick, label(power))
	}

	fmt.Fprintf(svg, `<path class="axis" fill="none" d="M%d %dV%dH%d"/>`+"\n", left, top, panelHeight-bottom, panelWidth-right)
	fmt.Fprintf(svg, `<text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n",
		(left+panelWidth-right)/2, panelHeight-tick*2, html.EscapeString(p.XLabel))
	fmt.Fprintf(svg, `<text x="%d" y="%d">%s</text>`+"\n", left+tick, top+fontSize, html.EscapeString(p.YLabel))

	for _, line := range p.Lines {
		class := classes[line.Name]
		steps := make([]string, len(line.Points))

		for i, point := range line.Points {
			steps[i] = fmt.Sprintf("%.1f %.1f", x.position(point.X), y.position(point.Y))
		}

		fmt.Fprintf(svg, `<path class="%s" d="M%s"/>`+"\n", lineClass(class), strings.Join(steps, "L"))

		for _, point := range line.Points {
			fmt.Fprintf(svg, `<circle class="m%s" cx="%.1f" cy="%.1f" r="%g"><title>%s: %s, %s %s</title></circle>`+"\n",
				class, x.position(point.X), y.position(point.Y), radius, html.EscapeString(line.Name), label(point.X), label(point.Y), p.YLabel)
		}
	}
}

// An axis maps values between two powers of ten to pixels.
type axis struct {
	low, high float64 // exponents
	from, to  float64
}

// axis finds the powers of ten that enclose all points.
func (p Panel) axis(of func(Point) float64, from, to int) axis {
	low, high := math.Inf(1), math.Inf(-1)

	for _, line := range p.Lines {
		for _, point := range line.Points {
			if value := of(point); value > 0 {
				low, high = min(low, math.Log10(value)), max(high, math.Log10(value))
			}
		}
	}

	if math.IsInf(low, 0) {
		low, high = 0, 1
	}

	low, high = math.Floor(low), math.Ceil(high)

	return axis{low: low, high: max(high, low+1), from: float64(from), to: float64(to)}
}

func (a axis) position(value float64) float64 {
	if value <= 0 {
		return a.from
	}

	return a.from + (math.Log10(value)-a.low)/(a.high-a.low)*(a.to-a.from)
}

func (a axis) ticks() []float64 {
	var ticks []float64
	for exponent := a.low; exponent <= a.high; exponent++ {
		ticks = append(ticks, math.Pow(10, exponent))
	}

	return ticks
}

// label writes a number as briefly as it can be read: 1k, 100k, 1M.
func label(value float64) string {
	switch {
	case value >= 1e6:
		return strconv.FormatFloat(value/1e6, 'g', 3, 64) + "M"
	case value >= 1e3:
		return strconv.FormatFloat(value/1e3, 'g', 3, 64) + "k"
	default:
		return strconv.FormatFloat(value, 'g', 3, 64)
	}
}
