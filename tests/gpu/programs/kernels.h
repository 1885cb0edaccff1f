/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels as PTX, which the driver compiles, so no CUDA compiler is needed. The code fits any PTX version from 6.0
 * on; gpu.h tries headers until the driver accepts one.
 *
 *   vgpu_empty()                             does nothing
 *   vgpu_spin(starts, ends, index, steps)    `steps` dependent multiplications in each thread, between two readings of
 *                                            %globaltimer; stores the earliest and latest of all blocks at index
 *   vgpu_mark(ring, counter)                 stores %globaltimer at ring[counter++]: a graph's parameters are the same
 *                                            at each replay, so a counter must number the launches
 *   vgpu_touch(words, count, seed)           words[i] = i * 2654435761 + seed
 *
 * Work is counted in steps, not in time: a kernel that waited for a time would seem to run while another process has the
 * GPU. The multiplications end in a store that is never executed; without it the compiler would remove them.
 */
#ifndef KERNELS_H
#define KERNELS_H

static const char *const ptx_headers[] = {
    ".version 6.0\n.target sm_50\n",
    ".version 6.3\n.target sm_75\n",
    ".version 7.0\n.target sm_80\n",
    ".version 7.8\n.target sm_90\n",
};

static const char ptx_body[] =
    ".address_size 64\n"
    ".visible .entry vgpu_empty()\n"
    "{\n"
    "    ret;\n"
    "}\n"
    ".visible .entry vgpu_spin(.param .u64 p_starts, .param .u64 p_ends, .param .u32 p_index, .param .u32 p_steps)\n"
    "{\n"
    "    .reg .pred %p<4>;\n"
    "    .reg .b32 %r<6>;\n"
    "    .reg .b64 %rd<9>;\n"
    "    ld.param.u64 %rd1, [p_starts];\n"
    "    ld.param.u64 %rd2, [p_ends];\n"
    "    ld.param.u32 %r1, [p_index];\n"
    "    ld.param.u32 %r2, [p_steps];\n"
    "    cvta.to.global.u64 %rd1, %rd1;\n"
    "    cvta.to.global.u64 %rd2, %rd2;\n"
    "    mul.wide.u32 %rd3, %r1, 8;\n"
    "    add.s64 %rd4, %rd1, %rd3;\n"
    "    add.s64 %rd5, %rd2, %rd3;\n"
    "    mov.u32 %r3, %tid.x;\n"
    "    mov.u32 %r4, %r3;\n"
    "    mov.u64 %rd6, %globaltimer;\n"
    "    setp.eq.u32 %p1, %r2, 0;\n"
    "    @%p1 bra spin_done;\n"
    "spin_again:\n"
    "    mad.lo.u32 %r4, %r4, 1664525, 1013904223;\n"
    "    add.u32 %r2, %r2, 4294967295;\n"
    "    setp.ne.u32 %p2, %r2, 0;\n"
    "    @%p2 bra spin_again;\n"
    "spin_done:\n"
    "    bar.sync 0;\n"
    "    mov.u64 %rd7, %globaltimer;\n"
    "    setp.ne.u32 %p3, %r3, 0;\n"
    "    @%p3 bra spin_leave;\n"
    "    red.global.min.u64 [%rd4], %rd6;\n"
    "    red.global.max.u64 [%rd5], %rd7;\n"
    "spin_leave:\n"
    "    setp.ne.u32 %p1, %r2, 4294967295;\n"
    "    @%p1 bra spin_end;\n"
    "    st.global.u32 [%rd4], %r4;\n"
    "spin_end:\n"
    "    ret;\n"
    "}\n"
    ".visible .entry vgpu_mark(.param .u64 p_ring, .param .u64 p_counter)\n"
    "{\n"
    "    .reg .b64 %rd<8>;\n"
    "    ld.param.u64 %rd1, [p_ring];\n"
    "    ld.param.u64 %rd2, [p_counter];\n"
    "    cvta.to.global.u64 %rd1, %rd1;\n"
    "    cvta.to.global.u64 %rd2, %rd2;\n"
    "    mov.u64 %rd3, %globaltimer;\n"
    "    atom.global.add.u64 %rd4, [%rd2], 1;\n"
    "    shl.b64 %rd5, %rd4, 3;\n"
    "    add.s64 %rd6, %rd1, %rd5;\n"
    "    st.global.u64 [%rd6], %rd3;\n"
    "    ret;\n"
    "}\n"
    ".visible .entry vgpu_touch(.param .u64 p_words, .param .u64 p_count, .param .u32 p_seed)\n"
    "{\n"
    "    .reg .pred %p<3>;\n"
    "    .reg .b32 %r<8>;\n"
    "    .reg .b64 %rd<9>;\n"
    "    ld.param.u64 %rd1, [p_words];\n"
    "    ld.param.u64 %rd2, [p_count];\n"
    "    ld.param.u32 %r1, [p_seed];\n"
    "    cvta.to.global.u64 %rd1, %rd1;\n"
    "    mov.u32 %r2, %ctaid.x;\n"
    "    mov.u32 %r3, %ntid.x;\n"
    "    mov.u32 %r4, %tid.x;\n"
    "    mov.u32 %r5, %nctaid.x;\n"
    "    mul.wide.u32 %rd3, %r2, %r3;\n"
    "    cvt.u64.u32 %rd4, %r4;\n"
    "    add.s64 %rd3, %rd3, %rd4;\n"
    "    mul.wide.u32 %rd5, %r5, %r3;\n"
    "    setp.ge.u64 %p1, %rd3, %rd2;\n"
    "    @%p1 bra touch_end;\n"
    "touch_again:\n"
    "    cvt.u32.u64 %r6, %rd3;\n"
    "    mad.lo.u32 %r7, %r6, 2654435761, %r1;\n"
    "    shl.b64 %rd6, %rd3, 2;\n"
    "    add.s64 %rd7, %rd1, %rd6;\n"
    "    st.global.u32 [%rd7], %r7;\n"
    "    add.s64 %rd3, %rd3, %rd5;\n"
    "    setp.lt.u64 %p2, %rd3, %rd2;\n"
    "    @%p2 bra touch_again;\n"
    "touch_end:\n"
    "    ret;\n"
    "}\n";

#endif
