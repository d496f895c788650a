package redisdedupe

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/testenv"
)

// clocks fails the test when a command takes a time of this process along.
type clocks struct{ tb testing.TB }

func (c clocks) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (c clocks) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.look(cmd)
		return next(ctx, cmd)
	}
}

func (c clocks) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			c.look(cmd)
		}
		return next(ctx, cmds)
	}
}

// look takes numbers for times in every unit. A token is the server's own time,
// which only the server has made.
func (c clocks) look(cmd redis.Cmder) {
	if cmd.Name() != "eval" && cmd.Name() != "evalsha" {
		return
	}
	for i, a := range cmd.Args() {
		n, err := strconv.ParseInt(fmt.Sprint(a), 10, 64)
		if err != nil || n < 1e9 || i == 5 { // 5 is where the token stands
			continue
		}
		for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond, time.Nanosecond} {
			if n < int64(1<<62)/int64(unit) && time.Since(time.Unix(0, n*int64(unit))).Abs() < 48*time.Hour {
				c.tb.Errorf("%s takes %d along, which is about now in units of %v", cmd.Name(), n, unit)
			}
		}
	}
}

// B32: no time of the process reaches Redis, so a clock that is wrong decides
// nothing there.
func TestB32NoTimeOfTheProcess(t *testing.T) {
	for _, c := range storetest.LeaseCases() {
		if c.Name == "B28 a slow handler keeps its lease" {
			continue // slow, and it sends nothing that the others do not
		}
		t.Run(c.Name, func(t *testing.T) {
			rdb := redis.NewClient(&redis.Options{Addr: testenv.Redis(t), ContextTimeoutEnabled: true})
			rdb.AddHook(clocks{t})
			c.Func(t, openOn(t, rdb))
		})
	}
}
