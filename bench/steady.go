package main

import (
	"context"
	"errors"
	"time"
	"io"

	"github.com/legion-gorm/legion/internal/pgtest"
)

func steady(ctx context.Context, server *pgtest.Server, duration time.Duration, out io.Writer) error {
	return errors.New("todo")
}
