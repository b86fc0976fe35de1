package main

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkCalls has a sub-benchmark for each contender of each benchmark:
//
//	go test ./bench -run '^$' -bench 'Calls/one_rule.*sequential/GORM' -cpuprofile cpu.out
//
// The command measures them in turns, which is what to compare by. This is for profiles.
func BenchmarkCalls(b *testing.B) {
	for _, benchmark := range benchmarks(fullScale) {
		b.Run(benchmark.name, func(b *testing.B) {
			server, err := durable()
			require.NoError(b, err)

			scene, err := openScene(b.Context(), server, fullScale)
			require.NoError(b, err)
			b.Cleanup(func() { require.NoError(b, scene.close()) })
			require.NoError(b, benchmark.prepare(b.Context(), scene))

			steps := benchmark.steps
			if len(steps) == 0 {
				steps = []step{{label: "all"}}
			}

			for _, step := range steps {
				b.Run(step.label, func(b *testing.B) { benchmarkStep(b, scene, benchmark, step) })
			}
		})
	}
}

func benchmarkStep(b *testing.B, scene *scene, benchmark benchmark, step step) {
	b.Helper()

	scene.step = step
	if step.prepare != nil {
		require.NoError(b, step.prepare(b.Context(), scene))
	}

	callers := max(1, benchmark.callers, step.callers)

	for _, contender := range append([]contender{benchmark.floor}, benchmark.contenders...) {
		var numbers atomic.Int64 // over all runs of the same sub-benchmark

		b.Run(contender.name, func(b *testing.B) {
			session, closeSession, err := scene.begin(b.Context(), contender, callers, true)
			require.NoError(b, err)

			defer func() { require.NoError(b, closeSession()) }()

			call := contender.begin(session)
			before := session.counter.Counts()

			b.ReportAllocs()
			b.ResetTimer()
			b.SetParallelism(max(1, callers/runtime.GOMAXPROCS(0)))

			one := func() {
				number := int(numbers.Add(1))
				if err := call(b.Context(), number/100%hotGroups, number); err != nil {
					b.Error(err)
				}
			}

			if callers == 1 {
				for range b.N {
					one()
				}
			} else {
				b.RunParallel(func(parallel *testing.PB) {
					for parallel.Next() {
						one()
					}
				})
			}

			counts := session.counter.Since(before)
			b.ReportMetric(float64(counts.RoundTrips)/float64(b.N), "roundtrips/op")
			b.ReportMetric(float64(counts.Statements)/float64(b.N), "statements/op")
		})
	}
}
