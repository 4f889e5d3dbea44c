package redistest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// ServerError is an error reply, with its text as the server sent it ("WRONGTYPE Operation …").
type ServerError string

func (e ServerError) Error() string { return string(e) }

// commandLimit bounds one command, so that a paused server fails a test instead of hanging it.
const commandLimit = 10 * time.Second

// client speaks RESP2 over one connection, dialed when first needed and kept until it fails.
// It is kept because some commands speak of their own connection: WAIT, CLIENT ID, SELECT.
type client struct {
	addr string

	// mu protects conn and r, and makes command and reply one step. It is held during the network round trip,
	// so nobody who must not wait for a paused server may need it.
	mu   sync.Mutex
	conn net.Conn
	r    *bufio.Reader
}

// do sends args once and returns the reply. It never sends again: the command may have run.
func (c *client) do(args []string) (any, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		conn, err := net.DialTimeout("tcp", c.addr, commandLimit)
		if err != nil {
			return nil, err
		}
		c.conn, c.r = conn, bufio.NewReader(conn)
	}
	reply, err := c.roundTripLocked(args)
	if err != nil {
		// The position in the stream is unknown now; the next command must not read this one's reply.
		c.dropLocked()
		return nil, err
	}
	if e, ok := reply.(ServerError); ok {
		return nil, e
	}
	return reply, nil
}

func (c *client) roundTripLocked(args []string) (any, error) {
	if err := c.conn.SetDeadline(time.Now().Add(commandLimit)); err != nil {
		return nil, err
	}
	if _, err := c.conn.Write(encode(args)); err != nil {
		return nil, err
	}
	return decode(c.r)
}

// drop forgets the connection; the next command dials again.
func (c *client) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropLocked()
}

func (c *client) dropLocked() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn, c.r = nil, nil
	}
}

// encode writes a command as an array of bulk strings.
func encode(args []string) []byte {
	b := fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, a := range args {
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(a), a)
	}
	return b
}

// decode reads one reply: string, int64, nil, []any or, as a value, ServerError. An error means that the
// connection can no longer be used.
func decode(r *bufio.Reader) (any, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	body, ok := strings.CutSuffix(line, "\r\n")
	if !ok || body == "" {
		return nil, fmt.Errorf("redistest: malformed reply line %q", line)
	}
	kind, body := body[0], body[1:]
	switch kind {
	case '+':
		return body, nil
	case '-':
		return ServerError(body), nil
	case ':':
		return strconv.ParseInt(body, 10, 64)
	case '$', '*':
		n, err := strconv.Atoi(body)
		if err != nil {
			return nil, fmt.Errorf("redistest: malformed length in %q", line)
		}
		if n < 0 {
			return nil, nil //nolint:nilnil // the null reply of RESP2 is nil, and no error
		}
		if kind == '$' {
			return decodeBulk(r, n)
		}
		return decodeArray(r, n)
	}
	return nil, fmt.Errorf("redistest: unknown reply type in %q", line)
}

func decodeBulk(r *bufio.Reader, n int) (any, error) {
	b := make([]byte, n+2)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, err
	}
	if string(b[n:]) != "\r\n" {
		return nil, errors.New("redistest: bulk string without its line end")
	}
	return string(b[:n]), nil
}

func decodeArray(r *bufio.Reader, n int) (any, error) {
	items := make([]any, n)
	for i := range items {
		var err error
		if items[i], err = decode(r); err != nil {
			return nil, err
		}
	}
	return items, nil
}
