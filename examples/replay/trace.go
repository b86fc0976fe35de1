package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"
)

// timePerToken is how long a model takes for one generated token: the trace says how many
// there were, not how long they took.
const timePerToken = 20 * time.Millisecond

// A request is one row of a trace: one request to a language model.
type request struct {
	// offset is when it came, counted from the first request of the trace.
	offset time.Duration

	contextTokens   int64
	generatedTokens int64
}

func (r request) tokens() int64 { return r.contextTokens + r.generatedTokens }

// duration is how long the request is at work.
func (r request) duration() time.Duration { return time.Duration(r.generatedTokens) * timePerToken }

var traceHeader = []string{"TIMESTAMP", "ContextTokens", "GeneratedTokens"}

// traceTime is the layout of TIMESTAMP, with as many decimals of a second as there are.
const traceTime = "2006-01-02 15:04:05"

var (
	errTraceEmpty    = errors.New("the trace has no requests")
	errTraceHeader   = fmt.Errorf("the first line must be the header %q", traceHeader)
	errTraceOrder    = errors.New("TIMESTAMP is before that of the line above: sort the trace by time")
	errTraceNegative = errors.New("must not be negative")
)

func readTrace(name string, limit int) ([]request, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("open the trace: %w", err)
	}
	defer func() { _ = file.Close() }() // it was only read

	requests, err := parseTrace(file, limit)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}

	return requests, nil
}

// parseTrace reads a trace in CSV, at most limit requests of it. 0 reads all.
func parseTrace(source io.Reader, limit int) ([]request, error) {
	reader := csv.NewReader(source)
	reader.ReuseRecord = true
	reader.FieldsPerRecord = len(traceHeader)

	header, err := reader.Read()

	switch {
	case errors.Is(err, io.EOF):
		return nil, errTraceEmpty
	case errors.Is(err, csv.ErrFieldCount), err == nil && !slices.Equal(header, traceHeader):
		return nil, errTraceHeader
	case err != nil:
		return nil, fmt.Errorf("read the trace: %w", err)
	}

	var (
		requests []request
		first    time.Time
	)

	for limit == 0 || len(requests) < limit {
		record, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read the trace: %w", err)
		}

		parsed, at, err := parseRequest(record)
		if err == nil && len(requests) > 0 {
			parsed.offset = at.Sub(first)
			if parsed.offset < requests[len(requests)-1].offset {
				err = errTraceOrder
			}
		}

		if err != nil {
			line, _ := reader.FieldPos(0)

			return nil, fmt.Errorf("line %d of the trace: %w", line, err)
		}

		if len(requests) == 0 {
			first = at
		}

		requests = append(requests, parsed)
	}

	if len(requests) == 0 {
		return nil, errTraceEmpty
	}

	return requests, nil
}

func parseRequest(record []string) (parsed request, at time.Time, err error) {
	at, err = time.Parse(traceTime, record[0])
	if err != nil {
		return request{}, at, fmt.Errorf("TIMESTAMP: %w", err)
	}

	parsed.contextTokens, err = parseTokens(record, 1)
	if err != nil {
		return request{}, at, err
	}

	parsed.generatedTokens, err = parseTokens(record, 2)
	if err != nil {
		return request{}, at, err
	}

	return parsed, at, nil
}

func parseTokens(record []string, column int) (int64, error) {
	// 32 bits are two thousand million tokens: with that no sum of them overflows.
	tokens, err := strconv.ParseInt(record[column], 10, 32)
	if err == nil && tokens < 0 {
		err = errTraceNegative
	}

	if err != nil {
		return 0, fmt.Errorf("%s: %w", traceHeader[column], err)
	}

	return tokens, nil
}
