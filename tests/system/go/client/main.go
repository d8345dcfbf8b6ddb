// Asks a node what the lines on stdin say, and prints what came back: grpc-go as a caller of its own choosing.
//
// One line in is one call, one line out is how it ended; both are JSON. The messages are told by a descriptor set, so
// that no generated code is needed.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	_ "google.golang.org/genproto/googleapis/rpc/errdetails" // so that details can be told as JSON
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

// question is one line of stdin.
type question struct {
	Path        string            `json:"path"`   // as it goes over the wire
	Method      string            `json:"method"` // full name in the descriptor set: what the messages are
	Request     json.RawMessage   `json:"request"`
	Metadata    map[string]string `json:"metadata"`
	TimeoutMs   int               `json:"timeout_ms"` // 0: no deadline
	Gzip        bool              `json:"gzip"`
	CancelAfter int               `json:"cancel_after"` // leave after so many answers; 0: wait for the end
	IdleMs      int               `json:"idle_ms"`      // pause before the call, while keepalive goes on
}

// outcome is one line of stdout.
type outcome struct {
	Code        string            `json:"code"`
	Message     string            `json:"message"`
	Details     []json.RawMessage `json:"details"`
	Answers     []json.RawMessage `json:"answers"`
	Connections int64             `json:"connections"` // opened so far
}

type asker struct {
	connection *grpc.ClientConn
	files      *protoregistry.Files
	dials      atomic.Int64
}

func main() {
	target := flag.String("target", "", "host:port")
	descriptors := flag.String("descriptors", "", "a FileDescriptorSet")
	ca := flag.String("ca", "", "PEM that verifies the node; without it the connection is plaintext")
	flag.Parse()
	if err := run(*target, *descriptors, *ca); err != nil {
		fmt.Fprintln(os.Stderr, "go_client:", err)
		os.Exit(1)
	}
}

func run(target, descriptors, ca string) error {
	files, err := readFiles(descriptors)
	if err != nil {
		return err
	}
	transport, err := transportCredentials(ca)
	if err != nil {
		return err
	}
	asker := &asker{files: files}
	asker.connection, err = grpc.NewClient("passthrough:///"+target,
		grpc.WithTransportCredentials(transport),
		grpc.WithContextDialer(asker.dial),
		// The shortest interval that grpc-go allows itself, and the one that the node promises to bear.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithIdleTimeout(0),
	)
	if err != nil {
		return err
	}
	defer asker.connection.Close()
	return asker.answerLines(os.Stdin, os.Stdout)
}

func readFiles(path string) (*protoregistry.Files, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(data, &set); err != nil {
		return nil, err
	}
	return protodesc.NewFiles(&set)
}

func transportCredentials(ca string) (credentials.TransportCredentials, error) {
	if ca == "" {
		return insecure.NewCredentials(), nil
	}
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errors.New("no certificate in " + ca)
	}
	return credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: "localhost"}), nil
}

func (a *asker) dial(ctx context.Context, address string) (net.Conn, error) {
	a.dials.Add(1)
	return (&net.Dialer{}).DialContext(ctx, "tcp", address)
}

func (a *asker) answerLines(in io.Reader, out io.Writer) error {
	lines, results := bufio.NewScanner(in), json.NewEncoder(out)
	for lines.Scan() {
		var asked question
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			return err
		}
		ended, err := a.ask(asked)
		if err != nil {
			return err
		}
		if err := results.Encode(ended); err != nil {
			return err
		}
	}
	return lines.Err()
}

// ask makes one call. An error is one of this program; how the call ended is in the outcome.
func (a *asker) ask(asked question) (*outcome, error) {
	found, err := a.files.FindDescriptorByName(protoreflect.FullName(asked.Method))
	if err != nil {
		return nil, err
	}
	method := found.(protoreflect.MethodDescriptor)
	request := dynamicpb.NewMessage(method.Input())
	if err := protojson.Unmarshal(asked.Request, request); err != nil {
		return nil, err
	}
	time.Sleep(time.Duration(asked.IdleMs) * time.Millisecond)
	ctx, cancel := asked.context()
	defer cancel()
	options := []grpc.CallOption{grpc.WaitForReady(true)}
	if asked.Gzip {
		options = append(options, grpc.UseCompressor(gzip.Name))
	}
	ended := &outcome{Details: []json.RawMessage{}, Answers: []json.RawMessage{}}
	if method.IsStreamingServer() {
		err = a.stream(ctx, cancel, asked, request, method, options, ended)
	} else {
		response := dynamicpb.NewMessage(method.Output())
		err = a.connection.Invoke(ctx, asked.Path, request, response, options...)
		if err == nil {
			err = ended.add(response)
		}
	}
	ended.Connections = a.dials.Load()
	return ended, ended.end(err)
}

func (asked question) context() (context.Context, context.CancelFunc) {
	ctx := metadata.NewOutgoingContext(context.Background(), metadata.New(asked.Metadata))
	if asked.TimeoutMs == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Duration(asked.TimeoutMs)*time.Millisecond)
}

func (a *asker) stream(
	ctx context.Context, cancel context.CancelFunc, asked question, request proto.Message,
	method protoreflect.MethodDescriptor, options []grpc.CallOption, ended *outcome,
) error {
	description := &grpc.StreamDesc{ServerStreams: true, ClientStreams: method.IsStreamingClient()}
	stream, err := a.connection.NewStream(ctx, description, asked.Path, options...)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(request); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for {
		response := dynamicpb.NewMessage(method.Output())
		if err := stream.RecvMsg(response); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := ended.add(response); err != nil {
			return err
		}
		if len(ended.Answers) == asked.CancelAfter {
			cancel()
		}
	}
}

func (o *outcome) add(message proto.Message) error {
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(message)
	o.Answers = append(o.Answers, text)
	return err
}

// end tells the status of a call; details that are no known message are told in base64.
func (o *outcome) end(err error) error {
	found := status.Convert(err)
	o.Code, o.Message = found.Code().String(), found.Message()
	for _, detail := range found.Proto().GetDetails() {
		text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(detail)
		if err != nil {
			text, err = json.Marshal(base64.StdEncoding.EncodeToString(detail.GetValue()))
			if err != nil {
				return err
			}
		}
		o.Details = append(o.Details, text)
	}
	return nil
}
