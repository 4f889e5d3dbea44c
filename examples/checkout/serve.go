package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/goredis"
	rueidisdriver "github.com/e51fe0e6/dsync/driver/rueidis"
	"github.com/e51fe0e6/dsync/dsync"
)

// shopCommand makes this program one process of the shop; the parent starts it so.
const shopCommand = "shop"

// redisEnv hands the URL to the shops: a password in it has no place in a list of processes.
const redisEnv = "CHECKOUT_REDIS"

// Kinds of lock.
const (
	lockLocal = "local"
	lockDsync = "dsync"
)

type shopConfig struct {
	lock, driver, redis, prefix, bank string
	ttl                               time.Duration
}

// shopMain serves until ctx or standard input ends: the parent holds the other end, so a shop never outlives it.
func shopMain(ctx context.Context, args []string) int {
	cfg := shopConfig{redis: os.Getenv(redisEnv)}
	flags := flag.NewFlagSet(shopCommand, flag.ExitOnError)
	flags.StringVar(&cfg.lock, "lock", lockDsync, "local: a sync.Mutex; dsync: a dsync.Mutex")
	flags.StringVar(&cfg.driver, "driver", "goredis", "goredis or rueidis")
	flags.StringVar(&cfg.prefix, "prefix", "checkout", "of the keys in Redis")
	flags.StringVar(&cfg.bank, "bank", "", "`URL` of the bank")
	flags.DurationVar(&cfg.ttl, "ttl", 3*time.Second, "lease of the locks")
	_ = flags.Parse(args) // ExitOnError

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with the process at the latest
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if err := runShop(ctx, cfg); err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "checkout shop:", err)
		return 1
	}
	return 0
}

func runShop(ctx context.Context, cfg shopConfig) error {
	locks, closeLocks, err := openLocks(ctx, cfg)
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := &shop{locks: locks, bank: &bankClient{http: newHTTPClient(), url: cfg.bank, pid: os.Getpid()}}
	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second}
	stopped := make(chan struct{})
	go func() { // ends with ctx; waited for below
		defer close(stopped)
		<-ctx.Done()
		// First no more requests, then no more locks: a section that is running may end.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = server.Shutdown(ctx)
		closeLocks(ctx)
	}()
	fmt.Println(readyPrefix + "http://" + listener.Addr().String())
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	<-stopped
	return nil
}

func openLocks(ctx context.Context, cfg shopConfig) (locks, func(context.Context), error) {
	if cfg.lock == lockLocal {
		return &localLocks{}, func(context.Context) {}, nil
	}
	d, closeRedis, err := openDriver(cfg)
	if err != nil {
		return nil, nil, err
	}
	client := dsync.New(d, dsync.WithPrefix(cfg.prefix))
	if err := client.Ping(ctx); err != nil { // tells at once what the first lock would tell later
		closeRedis()
		return nil, nil, err
	}
	return &sharedLocks{client: client, ttl: cfg.ttl}, func(ctx context.Context) {
		if err := client.Close(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "checkout shop:", err)
		}
		closeRedis()
	}, nil
}

// openDriver makes the Redis client, which is the program's own in every way, and the adapter around it.
func openDriver(cfg shopConfig) (driver.Driver, func(), error) {
	switch cfg.driver {
	case "goredis":
		opts, err := redis.ParseURL(cfg.redis)
		if err != nil {
			return nil, nil, err
		}
		c := redis.NewClient(opts)
		return goredis.New(c), func() { _ = c.Close() }, nil
	case "rueidis":
		opts, err := rueidis.ParseURL(cfg.redis)
		if err != nil {
			return nil, nil, err
		}
		opts.ForceSingleClient, opts.DisableCache = true, true // the embedded Redis needs both
		c, err := rueidis.NewClient(opts)
		if err != nil {
			return nil, nil, err
		}
		return rueidisdriver.New(c), c.Close, nil
	}
	return nil, nil, fmt.Errorf("driver %q, want goredis or rueidis", cfg.driver)
}
