package sim

import (
	"bytes"
	"strconv"
)

// frame returns the length of the first complete RESP value in b, or 0 if it is not complete yet.
func frame(b []byte) int {
	end := bytes.Index(b, []byte("\r\n"))
	if end < 1 {
		return 0
	}
	at := end + 2
	n, err := strconv.Atoi(string(b[1:end]))
	switch b[0] {
	case '$', '!', '=':
		if err != nil || n < 0 {
			return at
		}
		if at += n + 2; at > len(b) {
			return 0
		}
		return at
	case '*', '>', '~', '%', '|':
		if b[0] == '%' || b[0] == '|' {
			n *= 2
		}
		for ; err == nil && n > 0; n-- {
			size := frame(b[at:])
			if size == 0 {
				return 0
			}
			at += size
		}
		return at
	default: // simple string, error, integer, null, bool, double
		return at
	}
}

// message returns the payload of a frame that is a message of a subscription.
func message(b []byte) (payload string, ok bool) {
	if len(b) == 0 || !bytes.HasPrefix(b[1:], []byte("3\r\n$7\r\nmessage\r\n")) {
		return "", false
	}
	at := len("*3\r\n$7\r\nmessage\r\n")
	at += frame(b[at:]) // the channel
	_, text, _ := bytes.Cut(b[at:], []byte("\r\n"))
	return string(bytes.TrimSuffix(text, []byte("\r\n"))), true
}

// command returns a request as a client sends it.
func command(args ...string) []byte {
	b := []byte("*" + strconv.Itoa(len(args)) + "\r\n")
	for _, arg := range args {
		b = append(b, "$"+strconv.Itoa(len(arg))+"\r\n"+arg+"\r\n"...)
	}
	return b
}

// subscribes reports whether a client's request may be a SUBSCRIBE: its connection is one for messages then.
func subscribes(b []byte) bool {
	return bytes.Contains(bytes.ToLower(b[:min(len(b), 64)]), []byte("\r\n$9\r\nsubscribe\r\n"))
}
