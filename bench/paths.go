package main

import (
	"context"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/bench/internal/measure"
	"github.com/legion-gorm/legion/limiter"
)

// The names of the paths that a verdict can take, and of whom they are compared with.
const (
	gormPath   = "GORM path"
	serverPath = "server path"

	originalDesign = "original's design"
	tokenBucket    = "token bucket"
)

// paths are the ways of Legion that are measured, each with the options of its plugin.
var paths = []path{
	{name: gormPath},
	{name: serverPath, options: []legion.Option{legion.WithServerFunction()}},
}

type path struct {
	name    string
	options []legion.Option
}

// A contender is one of those that a benchmark compares.
type contender struct {
	name string

	// path is the way of Legion that the contender takes. Nil: it does without the plugin.
	path *path

	// begin returns the call that is measured.
	begin func(session *session) measure.Call
}

// A session is a contender at a database.
type session struct {
	// name is the contender's, in the names of what is its own.
	name   string
	scene  *scene
	db     *gorm.DB
	plugin *legion.Plugin

	counter *measure.Counter
}

// onPaths are the contenders that do the same on every path.
func onPaths(begin func(session *session) measure.Call) []contender {
	contenders := make([]contender, len(paths))
	for i := range paths {
		contenders[i] = contender{name: paths[i].name, path: &paths[i], begin: begin}
	}

	return contenders
}

// A scenario is who asks for what in a call.
type scenario struct {
	agent func(session *session, number int) string
	rules func(session *session, batch, number int) []limiter.Rule

	// denied says that every call is; either, that some may be.
	denied, either bool
}

// newAgent is an agent that nobody has seen before.
func newAgent(session *session, number int) string {
	return agentName(ownPrefix+session.name, number)
}

// contenders are the paths and the original's design.
func (s scenario) contenders() []contender {
	return append(onPaths(s.enforce), contender{name: originalDesign, begin: s.enforceAsOriginal})
}

// contendersAndBucket are those, and the token bucket.
func (s scenario) contendersAndBucket() []contender {
	return append(s.contenders(), contender{name: tokenBucket, begin: s.takeToken})
}

func (s scenario) enforce(session *session) measure.Call {
	return func(ctx context.Context, batch, number int) error {
		err := limiter.Enforce(session.db.WithContext(ctx), s.agent(session, number), s.rules(session, batch, number)...)

		return s.expect(err, limiter.ErrExceeded)
	}
}
